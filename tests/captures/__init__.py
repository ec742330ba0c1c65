"""Tests of the capture and its proof."""
