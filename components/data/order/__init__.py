"""Orders of rows within an epoch, and the stream of rows by position that they and a mixture's weights make."""
