"""Write the pages of the site that follow from the code: the API, the commands, the operators, the gallery."""
