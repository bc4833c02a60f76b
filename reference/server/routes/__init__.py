"""What the server answers, one file for each family of APIs."""
