"""MaxText's circular pipeline as one program: all stages run at once, and everything moves on by one."""
