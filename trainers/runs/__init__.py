"""What every launched training shares: settings, launch, ranks, report."""
