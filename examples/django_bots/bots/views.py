"""The bots over HTTP."""

from django.http import HttpRequest, JsonResponse
from django.views import View

from bots.deck import deck, start
from everdeck import EverdeckError, UnknownWorker, WorkerStatus


def shown(status: WorkerStatus) -> dict[str, object]:
    return {"user": status.name, "state": status.state.value, "pid": status.pid}


def every_bot(_: HttpRequest) -> JsonResponse:
    return JsonResponse({"bots": [shown(status) for status in deck().list()]})


class Bot(View):
    """The bot of one user."""

    def post(self, _: HttpRequest, user: str) -> JsonResponse:
        try:
            return JsonResponse(shown(start(user)))
        except EverdeckError as error:
            return JsonResponse({"error": str(error)}, status=400)

    def delete(self, _: HttpRequest, user: str) -> JsonResponse:
        try:
            return JsonResponse(shown(deck().stop(user)))
        except UnknownWorker as error:
            return JsonResponse({"error": str(error)}, status=404)
