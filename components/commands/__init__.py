"""Commands of training runs; each is imported only when it is called."""
