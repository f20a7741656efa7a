"""Saved functions for programs in other languages: plain modules, raw arrays, and a layout."""
