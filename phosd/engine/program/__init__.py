"""Find processes, their trees and groups, and run the driver's checkpoint on them."""
