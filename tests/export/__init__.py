"""Modules for other programs."""
