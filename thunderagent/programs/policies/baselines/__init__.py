"""What to compare with: policies that use little or nothing of what is known of programs."""
