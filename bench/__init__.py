"""Speed, memory and host cost of flashattn beside its alternatives: see ``python -m bench --help``."""
