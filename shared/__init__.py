"""What two or more services use: wire messages, configuration, ids, metrics, logging, errors."""
