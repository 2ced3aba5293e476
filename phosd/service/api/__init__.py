"""Define the objects on the bus: their methods, properties and signals."""
