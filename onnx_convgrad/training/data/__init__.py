"""Data sets, image folders and batches."""
