"""Snapshots of an executor's counters for people: tables, HTML, drawings."""
