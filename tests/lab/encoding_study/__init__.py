"""Tests of wherewhat.lab.encoding_study."""
