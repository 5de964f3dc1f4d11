"""Any device, memory linear in N."""
