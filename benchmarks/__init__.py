"""Measurements of speed and cost, one module each. results/ contains measured numbers with the machine and the date."""
