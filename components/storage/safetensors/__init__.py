"""Safetensors files: header, reader and writer."""
