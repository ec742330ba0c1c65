"""Tests of wherewhat.encodings; Python itself has a package of the name encodings."""
