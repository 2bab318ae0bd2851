"""CUDA source of cunorm, read as text by cunorm.source."""
