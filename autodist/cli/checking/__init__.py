"""The checks of `autodist check`, and its report."""
