"""The types of planning as frozen dataclasses, with the errors, units and strict text readers that all packages use."""
