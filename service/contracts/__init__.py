"""What outsiders build on, made from the types the code itself uses."""
