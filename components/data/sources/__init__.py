"""Sources of documents: files in several formats, divided into parts that processes read independently."""
