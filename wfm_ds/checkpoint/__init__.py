"""Saving, restoring, exporting and converting of weights, for any number of ranks and any ZeRO stage."""
