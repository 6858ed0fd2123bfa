"""Commands that know training; each is imported only when it is called."""
