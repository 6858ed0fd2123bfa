"""Document sources: files in several formats, divided into parts for independent reading."""
