"""What an exported encoder has learnt."""
