"""The same work done by this package, by other tools and by bare NumPy, in one sitting."""
