"""Grammars that bind answers: specs are checked, compiled away from the step loop, and matched token by token."""
