"""Captioned media and prompts: found, checked, framed, ordered and dealt to the ranks."""
