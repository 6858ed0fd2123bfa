"""MaxText's circular pipeline as one program: all stages run at once, and all outputs move on by one stage."""
