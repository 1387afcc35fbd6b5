"""Where the views are."""

from django.urls import path

from bots.views import Bot, every_bot

urlpatterns = [path("bots/", every_bot), path("bots/<user>/", Bot.as_view())]
