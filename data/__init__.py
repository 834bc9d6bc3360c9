"""Yambda-format data: raw files -> event store -> batches."""
