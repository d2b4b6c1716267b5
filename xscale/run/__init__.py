"""What a run does and keeps."""
