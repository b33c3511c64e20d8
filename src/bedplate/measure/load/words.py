"""Common English words for prompts; each is one token in most tokenizers."""

_TEXT = """
    able above action against agree allow already among another apply army article author back ball bar bear
    become begin best beyond bird blood boat born box bridge brown busy camp car carry cause central chair
    chapter child church city clean club code collect come concern cook corner country court cross cup dark day
    death deep design develop dinner doctor double draw drink dry early easy edge eight empty engine enter even
    ever expect eye fail famous fast feel fight film fine fire fish follow force forget former free front future
    gas give gold green grow gun hand hard hear heavy here hold horse hour huge idea impact indeed issue join
    just kid king large laugh learn leg level like listen local lose love main man mark match mean meet mention
    middle milk miss moment moon mother movie must natural need new night north nothing object offer oil one
    order over pain park pass pattern people person piece plane player police popular present price process
    program prove purpose quality quite rain rate reach real recent reduce remove respect return right risk rock
    round safe say science seat section sell series service several ship should sign simple single six sleep
    snow soldier song sound space speech sport staff star station still store street study subject suggest
    support system talk teach ten than them there think thought throw today total town train tree trouble truth
    twelve under until usual very visit wait want wash wave weather welcome what where while why will window
    wish woman word worry writer year
"""
WORDS = tuple(_TEXT.split())
