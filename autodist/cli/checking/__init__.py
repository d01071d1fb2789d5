"""What `autodist check` finds out about machines, and what it makes of that."""
