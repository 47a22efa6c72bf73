"""What do all ranks hold, and what is tied?

`describe` is what one rank says of its stages, `merge` makes the one `manifest` of it that all
ranks share, `claims` decides which parameters a declared tie means, and `suspects` recognises by
their initial values the ties that nobody declared.
"""
