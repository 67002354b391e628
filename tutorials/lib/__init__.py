"""What every chapter imports: asserts that speak, figures, exercises. See page.py."""
