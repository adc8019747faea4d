"""Bridges to other libraries; each module imports its library, and nothing imports these modules."""
