"""All numbers and figures of pictures, written to a folder."""
