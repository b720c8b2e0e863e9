"""Analyses behind ``evalkit analyze``: one file an analysis, data beside its picture, each goes on after a kill."""
