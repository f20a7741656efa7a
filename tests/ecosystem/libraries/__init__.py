"""One module per library, each with its MODELS; one whose library is missing skips itself."""
