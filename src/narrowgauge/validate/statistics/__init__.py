"""Statistics of a validation: equivalence tests, sample sizes and the t distribution."""
