"""What runs did and what their models can do, on a page or in the console."""
