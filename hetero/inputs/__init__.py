"""Helpers for job files: file formats, and data to try things with. Importing it loads no TensorFlow."""
