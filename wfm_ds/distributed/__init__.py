"""The processes of a run: who they are, how they start and stop, and who is to blame if one does not answer."""
