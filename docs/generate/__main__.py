"""Write the generated pages that take seconds."""

from docs.generate import api, columns, commands, tracking
from docs.generate.write import write_pages

for module in (columns, tracking, api, commands):
    write_pages(module.pages())
