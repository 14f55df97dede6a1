"""Exchange of attention heads, with rotary embedding."""
