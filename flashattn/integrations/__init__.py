"""Registrations with other libraries, one module each.  Nothing happens until ``register`` is called."""
