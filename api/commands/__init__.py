"""The commands of the CLI, by what they are about."""
