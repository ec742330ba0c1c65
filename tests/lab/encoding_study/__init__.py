"""Tests of wherewhat_lab.encoding_study."""
