"""How tokens get to their experts, and back."""
