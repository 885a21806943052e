"""What a model's attention is: recording it, its layers and its grid of patches."""
